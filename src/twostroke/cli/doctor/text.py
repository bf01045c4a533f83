"""Writes what ``twostroke doctor`` prints for a person: a line a fact, then each thing to mend and its command."""

from __future__ import annotations

from twostroke.cli.doctor.advice import Advice
from twostroke.cli.doctor.facts import Facts, Profile
from twostroke.core.units import format_bytes


def doctor_text(facts: Facts, advice: list[Advice]) -> str:
    """All facts, then what to mend or a line that says that nothing is missing."""
    lines = [f"{name:<10} {value}" for name, value in _rows(facts)]
    if not advice:
        return "\n".join([*lines, "", "Nothing is missing."])
    for item in advice:
        lines += ["", f"{'must be mended' if item.is_fatal else 'to mend'}: {item.problem}", f"  $ {item.remedy}"]
    return "\n".join(lines)


def _rows(facts: Facts) -> list[tuple[str, str]]:
    cores = (
        f"{facts.n_cores} of {facts.n_cores_of_machine}" if facts.n_cores != facts.n_cores_of_machine else str(facts.n_cores)
    )
    group = "" if facts.group_cores is None else f", control group: {facts.group_cores:g} at once"
    kernels = facts.kernel_target or "torch's, because the native library is absent"
    cuda = f", CUDA {facts.torch_cuda}" if facts.torch_cuda else ", built without CUDA"
    rows = [
        ("processor", f"{facts.cpu_model}; cores: {cores}{group}"),
        ("features", ", ".join(facts.features) or "none that kernels use"),
        ("kernels", kernels),
        ("compiler", facts.compiler or "none"),
        ("memory", f"{format_bytes(facts.ram_bytes)}, available {format_bytes(facts.available_bytes)}"),
        ("disk", f"{format_bytes(facts.home.free_bytes)} free for {facts.home.path}"),
        ("", f"{format_bytes(facts.here.free_bytes)} free for {facts.here.path}"),
        ("python", facts.python),
        ("torch", facts.torch_version + cuda if facts.torch_version else "not installed"),
        ("GPU", ", ".join(facts.gpus) or "none that the driver shows"),
        ("load", f"{facts.busy_cores:.1f} of {facts.n_cores_of_machine} cores are busy now"),
    ]
    rows += [("profile", _profile(profile)) for profile in facts.profiles] or [("profile", "none of this machine")]
    return rows


def _profile(profile: Profile) -> str:
    engines = " and ".join(profile.engines)
    return f"{profile.device}, for {engines}: measured {profile.measured_at}, {profile.age_days:.0f} days ago"
