"""Downloads models by their name on the Hugging Face Hub."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from twostroke.core.errors import InputError, TwostrokeError

WANTED = ["*.json", "*.safetensors", "*.jinja"]
UNWANTED = ["original/*", "onnx/*", "openvino/*", "runs/*"]

_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")


def is_hub_name(source: str) -> bool:
    """True for ``owner/name``. A name that ends like a model file is taken for a misspelt path."""
    return bool(_NAME.fullmatch(source)) and not source.endswith((".gguf", ".bin", ".safetensors"))


def download(name: str) -> Path:
    """The local directory of the model ``name``, downloaded or from the cache. Code and pickles are not downloaded.

    Raises InputError if the Hub has no such model or refuses it, TwostrokeError if it cannot be reached.
    """
    import huggingface_hub
    from huggingface_hub import errors

    if not sys.stderr.isatty():  # in a log, each redrawing of the bar would be a line
        huggingface_hub.utils.disable_progress_bars()
    try:
        return Path(huggingface_hub.snapshot_download(name, allow_patterns=WANTED, ignore_patterns=UNWANTED))
    except errors.GatedRepoError:
        raise InputError(
            f"the Hub gives {name} only to those who accept its terms. Accept them there, and log in with `hf auth login`."
        ) from None
    except errors.RepositoryNotFoundError:
        raise InputError(
            f"the Hub has no model {name!r} that you may read. Check the name, or log in with `hf auth login`."
        ) from None
    except errors.HFValidationError as error:
        raise InputError(f"{name!r} is neither a path that exists nor a Hub name: {error}.") from None
    except (OSError, errors.OfflineModeIsEnabled) as error:
        # Every failure of the connection is some OSError, and most have pages of explanation: the first line says enough.
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise TwostrokeError(
            f"{name!r} is not a path that exists, and as a Hub name it could not be downloaded ({reason:.200}). "
            "Offline, give the path of a model directory, a GGUF file or a llama2.c file."
        ) from None
