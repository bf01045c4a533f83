"""The options of roles of `serve`: what does not go together is told at once."""

from __future__ import annotations

from pathlib import Path

import pytest

from twostroke.cli.serve_verb import _handover
from twostroke.core.errors import ConfigError
from twostroke.server.handover.settings import HandoverSettings


def test_roles_need_their_address_and_far_ones_a_key(tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text("k" * 32)
    assert _handover("joint", None, [], None) is None
    assert _handover("prefill", "h:1", [], key) == HandoverSettings("h:1", (), str(key))
    assert _handover("decode", None, ["/s", "h:1"], key) == HandoverSettings(None, ("/s", "h:1"), str(key))
    assert _handover("decode", None, ["/s"], None) == HandoverSettings(None, ("/s",))
    for role, listen, peers, file, word in (
        ("both", None, [], None, "is not known"),
        ("prefill", None, [], None, "--listen go together"),
        ("joint", "/s", [], None, "--listen go together"),
        ("decode", None, [], None, "--peer go together"),
        ("joint", None, ["/s"], None, "--peer go together"),
        ("prefill", "0.0.0.0:1", [], None, "must prove who they are"),
        ("decode", None, ["host"], None, "HOST:PORT"),
        ("joint", None, [], key, "is for engines at HOST:PORT"),
        ("decode", None, ["h:1"], tmp_path / "none", "cannot be read"),
    ):
        with pytest.raises(ConfigError, match=word):
            _handover(role, listen, peers, file)
