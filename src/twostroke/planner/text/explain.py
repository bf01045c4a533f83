"""``--explain`` as text: one line a term, with its numbers substituted, and the letters that were used."""

from __future__ import annotations

from twostroke.core.units import format_bytes
from twostroke.planner.truth.glossary import meaning
from twostroke.planner.truth.record import Explanation, Term


def _value(term: Term) -> str:
    value = f"{term.value:,.0f}" if term.value == int(term.value) else f"{term.value:.6g}"
    if term.unit == "bytes" and abs(term.value) >= 1024:
        return f"{value} bytes ({format_bytes(term.value)})"
    return f"{value} {term.unit}".rstrip()


def term_line(term: Term) -> str:
    """``symbol = formula = numbers = value unit   [mark: source]``; an input has no formula to repeat."""
    if term.formula == "given":
        return f"{term.symbol} = {_value(term)}   [{term.mark}: {term.source}]"
    return f"{term.symbol} = {term.formula} = {term.substituted} = {_value(term)}   [{term.mark}: {term.source}]"


def explanation_text(explanation: Explanation) -> str:
    """All terms by section, then what each letter stands for."""
    lines, section = [], ""
    for term in explanation:
        if term.section != section:
            lines += ["", term.section]
            section = term.section
        lines.append(f"  {term_line(term)}")
    symbols = {term.symbol for term in explanation}
    letters = dict.fromkeys(name for term in explanation for name in term.used if name not in symbols)
    meanings = [f"  {name}: {text}" for name in letters if (text := meaning(name))]
    return "\n".join([*lines, "", "where", *meanings])
