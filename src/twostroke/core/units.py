"""Numbers for people: bytes, seconds, rates, money. GB is 10⁹ bytes, GiB is 2³⁰."""

from __future__ import annotations

GB = 10**9
GIB = 2**30
MIB = 2**20


def _three(value: float) -> str:
    """Three significant digits, and whole numbers from what rounds to a thousand on, where ``g`` would write 1e+03."""
    return f"{value:.3g}" if abs(value) < 999.5 else f"{value:.0f}"


def format_bytes(n_bytes: float) -> str:
    """``1234567890`` → ``1.15 GiB``; binary units, three significant digits."""
    value = float(n_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(value) < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{_three(value)} {unit}"
        value /= 1024
    return f"{_three(value)} TiB"


def format_seconds(seconds: float) -> str:
    """``0.00042`` → ``420 µs``, ``93`` → ``1 min 33 s``, ``90000`` → ``1 d 1.0 h``, ``1e6`` → ``11.6 d``."""
    if seconds < 0:
        return f"-{format_seconds(-seconds)}"
    if seconds == 0:
        return "0 s"
    if seconds < 1e-3:
        return f"{_three(seconds * 1e6)} µs"
    if seconds < 1:
        return f"{_three(seconds * 1e3)} ms"
    if seconds < 60:
        return f"{seconds:.3g} s"
    if seconds < 3600:
        return f"{int(seconds // 60)} min {int(seconds % 60)} s"
    if seconds < 86400:
        return f"{int(seconds // 3600)} h {int(seconds % 3600 // 60)} min"
    if seconds < 864_000:
        return f"{int(seconds // 86400)} d {seconds % 86400 / 3600:.1f} h"
    return f"{seconds / 86400:.3g} d" if seconds < 86_400_000 else f"{seconds / 86400:,.0f} d"


def format_count(n: float) -> str:
    """``12_200_000`` → ``12.2M``; decimal prefixes, three significant digits."""
    for bound, suffix in ((1e18, "E"), (1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(n) >= bound:
            return f"{_three(n / bound)}{suffix}"
    return _three(n)


def format_parameters(n: float) -> str:
    """``8_030_261_248`` → ``8.03B``: as models are called, with B for 10⁹ where a count has G."""
    return format_count(n).replace("G", "B")


def format_flop_rate(flop_per_s: float) -> str:
    """``938 GFLOP/s``."""
    text = format_count(flop_per_s)
    return f"{text[:-1]} {text[-1]}FLOP/s" if text[-1].isalpha() else f"{text} FLOP/s"


def _digits(value: float) -> str:
    """Three digits, and whole numbers from a thousand on."""
    return f"{value:,.0f}" if abs(value) >= 999.5 else f"{value:.3g}"


def format_energy(kwh: float) -> str:
    """``0.0012`` → ``1.2 Wh``: in kWh, Wh or mWh."""
    for least, unit, factor in ((0.1, "kWh", 1), (1e-4, "Wh", 1e3)):
        if abs(kwh) >= least:
            return f"{_digits(kwh * factor)} {unit}"
    return f"{_three(kwh * 1e6)} mWh"


def format_mass(kg: float) -> str:
    """``0.0012`` → ``1.2 g``: in kg, g or mg."""
    for least, unit, factor in ((0.1, "kg", 1), (1e-4, "g", 1e3)):
        if abs(kg) >= least:
            return f"{_digits(kg * factor)} {unit}"
    return f"{_three(kg * 1e6)} mg"


def format_money(usd: float) -> str:
    """Dollars with as many digits as a small or a large amount needs: ``$0.000012``, ``$1,234``."""
    if usd == 0:
        return "$0"
    if abs(usd) < 0.01:
        return f"${usd:.2g}" if abs(usd) >= 1e-4 else f"${usd:.2e}"
    return f"${usd:,.2f}" if abs(usd) < 1000 else f"${usd:,.0f}"
