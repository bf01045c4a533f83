"""Which instruction set is used where: a choice among sets of features, and no instruction beyond a file's target."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from twostroke.core.errors import ConfigError
from twostroke.kernels import native_library
from twostroke.kernels.native import build as native_build

library = native_library.library()
if library is None:
    pytest.skip(native_library.why_absent(), allow_module_level=True)

HASWELL = frozenset(["sse3", "ssse3", "sse4_1", "sse4_2", "popcnt", "xsave", "avx", "fma", "f16c", "avx2", "bmi2"])
CASCADE_LAKE = HASWELL | {"avx512f", "avx512dq", "avx512bw", "avx512vl", "avx512_vnni"}
SAPPHIRE_RAPIDS = CASCADE_LAKE | {"avx_vnni", "avx512_bf16", "amx_tile", "amx_int8", "amx_bf16"}
PROCESSORS = {
    "haswell": (HASWELL, "plain avx2"),
    "znver2": (HASWELL, "plain avx2"),
    "cascadelake": (CASCADE_LAKE, "plain avx2 avx512"),
    "icelake-server": (CASCADE_LAKE, "plain avx2 avx512"),
    "alderlake": (HASWELL | {"avx_vnni"}, "plain avx2 avxvnni"),
    "znver4": (CASCADE_LAKE | {"avx512_bf16"}, "plain avx2 avx512 avx512bf16"),
    "znver5": (CASCADE_LAKE | {"avx_vnni", "avx512_bf16"}, "plain avx2 avxvnni avx512 avx512bf16"),
    "sapphirerapids": (SAPPHIRE_RAPIDS, "plain avx2 avxvnni avx512 avx512bf16 amx"),
    "graniterapids": (SAPPHIRE_RAPIDS, "plain avx2 avxvnni avx512 avx512bf16 amx"),
}
"""Of nine processors, by GCC's names (Zen 2 is znver2), what they have of the features that any target needs, and the targets
that run there. From the GCC 14 manual, "x86 Options"; the first test asks the compiler where it knows them."""

OS = frozenset({"os_ymm", "os_zmm", "os_tiles"})
"""A system that keeps all registers."""

NAMES = library.ts_feature_names().decode().split()
TARGETS = list(native_library.targets())


def bits(features: frozenset[str]) -> int:
    assert features <= set(NAMES)
    return sum(1 << NAMES.index(name) for name in features)


def chosen(features: frozenset[str], wanted: str | None = None) -> str:
    assert library is not None
    return TARGETS[library.ts_choose(bits(features), -1 if wanted is None else TARGETS.index(wanted))]


def holding(features: frozenset[str]) -> str:
    return " ".join(name for name in TARGETS if chosen(features, name) == name)


def macros(*flags: str) -> frozenset[str]:
    """The features that the compiler may use with ``flags`` beyond those of every x86-64."""
    found = []
    for each in ((), flags):
        command = [*native_build.compiler(), *each, "-dM", "-E", "-x", "c++", "/dev/null"]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode != 0:
            pytest.skip(f"this compiler does not know {shown}" if (shown := " ".join(flags)) else done.stderr)
        found.append({line.split()[1] for line in done.stdout.splitlines()})
    return frozenset(
        feature_of(name) for name in found[1] - found[0] if re.fullmatch(r"__(SSE|SSSE|AVX|AMX|[A-Z0-9]+__$).*", name)
    )


def feature_of(macro: str) -> str:
    name = macro.strip("_").lower()
    of_another_name = {"crc32": "sse4_2", "avx512vnni": "avx512_vnni", "avxvnni": "avx_vnni", "avx512bf16": "avx512_bf16"}
    return of_another_name.get(name, re.sub(r"^amx_?", "amx_", name))


@pytest.mark.parametrize("processor", PROCESSORS)
def test_the_table_says_of_a_processor_what_the_compiler_knows(processor: str) -> None:
    features, _ = PROCESSORS[processor]
    assert features == macros(f"-march={processor}") & (set(NAMES) - OS)


@pytest.mark.parametrize("processor", PROCESSORS)
def test_a_processor_runs_the_targets_whose_every_feature_it_has(processor: str) -> None:
    features, expected = PROCESSORS[processor]
    assert holding(features | OS) == expected
    assert chosen(features | OS) == expected.split()[-1]


@pytest.mark.parametrize("wanted", TARGETS)
@pytest.mark.parametrize("processor", PROCESSORS)
def test_a_target_that_does_not_hold_is_never_run(processor: str, wanted: str) -> None:
    features, expected = PROCESSORS[processor]
    assert chosen(features | OS, wanted) == (wanted if wanted in expected.split() else expected.split()[-1])


def test_every_feature_of_a_target_is_needed() -> None:
    for name, needs in native_library.targets().items():
        for feature in needs:
            assert name not in holding(frozenset(NAMES) - {feature}).split()


def test_what_the_system_does_not_keep_is_not_used() -> None:
    """A kernel booted with noxsave, a virtual machine without AVX-512's state, and one that grants no tiles."""
    assert holding(SAPPHIRE_RAPIDS) == "plain"
    assert holding(SAPPHIRE_RAPIDS | {"os_ymm"}) == "plain avx2 avxvnni"
    assert holding(SAPPHIRE_RAPIDS | {"os_ymm", "os_zmm"}) == "plain avx2 avxvnni avx512 avx512bf16"


def test_older_processors_run_the_plain_target() -> None:
    ivy_bridge = frozenset(["sse3", "ssse3", "sse4_1", "sse4_2", "popcnt", "xsave", "avx", "f16c"])
    for features in (frozenset(), ivy_bridge, ivy_bridge | OS):
        assert holding(features) == "plain"


def test_the_features_here_are_those_that_linux_tells() -> None:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    told = next((set(line.split()) for line in lines if line.startswith("flags")), None)
    if told is None:
        pytest.skip("/proc/cpuinfo has no flags")
    told |= {"sse3"} if "pni" in told else set()
    assert set(native_library.features()) - OS == told & set(NAMES)


def test_the_best_that_holds_is_in_use_and_no_other_can_be_set() -> None:
    held = native_library.holding()
    assert held[0] == "plain"
    assert native_library.target() == held[-1]
    assert library is not None
    for wanted in (99, -5):
        assert TARGETS[library.ts_set_target(wanted)] == held[-1]
    for name in {*TARGETS, "avx10"} - set(held):
        with pytest.raises(ConfigError, match=f"target '{name}' cannot run here. Use one of plain"):
            native_library.set_target(name)
    assert native_library.target() == held[-1]


def flagged() -> list[Path]:
    return [path for path in native_build.sources("x86_64") if native_build._suffix(path) in native_build.FLAGS["x86_64"]]


def target_of(source: Path) -> str:
    return source.stem.rpartition("_")[2]


def test_the_compiler_may_use_nothing_that_the_target_does_not_need() -> None:
    for suffix, flags in native_build.FLAGS["x86_64"].items():
        assert macros(*(flag for flag in flags if not flag.startswith("-mprefer"))) <= set(native_library.targets()[suffix[1:]])


INSTRUCTIONS = {
    "vpdpbusd": "avx512_vnni",
    "%{vex%} vpdpbusd": "avx_vnni",
    **dict.fromkeys(("ldtilecfg", "tilerelease", "tilezero", "tileloadd", "tilestored"), "amx_tile"),
    **dict.fromkeys(("tdpbsud", "tdpbssd"), "amx_int8"),
    "tdpbf16ps": "amx_bf16",
}
"""What is written as an instruction, past the compiler's flags. vectors_avx2.h serves two targets and asks __AVXVNNI__."""


def text_of(source: Path) -> str:
    """``source`` and the headers beside it that it includes."""
    seen: dict[Path, str] = {}
    left = [source]
    while left:
        path = left.pop()
        if path not in seen and path.exists():
            seen[path] = path.read_text()
            left += [path.parent / name for name in re.findall(r'#include "(.+?)"', seen[path])]
    return "\n".join(seen.values())


def test_no_file_writes_an_instruction_that_its_target_does_not_need() -> None:
    for source in flagged():
        written = set(re.findall(r'__asm__(?: volatile)?\("(%\{vex%\} \w+|\w+)', text_of(source)))
        needed = {INSTRUCTIONS[instruction] for instruction in written}
        if target_of(source) == "avx2":
            assert re.search(r"#if(def| defined\()? ?\(?__AVXVNNI__", text_of(source)) or not needed
            needed -= {"avx_vnni"}
        assert needed <= set(native_library.targets()[target_of(source)]), source.name


@pytest.fixture(scope="module")
def symbols_and_sections() -> dict[str, tuple[str, str]]:
    """Of each flagged file what nm and readelf say of its object: those of the library's own build, where it kept them."""

    def said(*command: str) -> str:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    with native_build.object_folder() as folder:
        objects = native_build.compile_sources(folder)
        made = {source.name: str(objects[source]) for source in flagged()}
        return {name: (said("nm", "-C", "--defined-only", path), said("readelf", "-SW", path)) for name, path in made.items()}


def test_code_for_one_target_cannot_be_linked_into_that_of_another(symbols_and_sections: dict[str, tuple[str, str]]) -> None:
    """A weak symbol (an inline function, a template of the standard library) is taken from whichever file comes first, and what
    a file computes before main runs everywhere."""
    for name, (symbols, sections) in symbols_and_sections.items():
        assert [line for line in symbols.splitlines() if re.search(r" [WVu] (?!DW\.ref\.)", line)] == [], name
        assert ".init_array" not in sections, name
