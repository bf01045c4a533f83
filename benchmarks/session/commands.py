"""README's session: what a new user types, in order."""

from __future__ import annotations

NOTHING = r"(?!)"
SESSION = (  # command, what a shown line begins with
    ("twostroke calibrate", r"machine|products|serving|disk"),
    ("twostroke plan train recipes/quick.toml", r"^step |^memory |^rate "),
    ("twostroke train recipes/quick.toml", r"trained|held out| +predicted|time|speed|peak"),
    ('twostroke generate runs/quick --prompt "def " --max-tokens 24 --temperature 0.8 --seed 1', NOTHING),
    ("twostroke quantize runs/quick/model runs/quick-int8", r"runs/quick-int8"),
    ("twostroke bench serve runs/quick-int8 --users 4 --requests 64", r" +median|TTFT|TPOT|output tok/s"),
    ("twostroke plan compare runs/quick/model --scheme int8", NOTHING),
    ("twostroke ledger compare last", r" +predicted \[|(ttft_s|tpot_s|output_tok_per_s) .*\["),
    ("twostroke ledger report --out runs/report.html", r"report"),
)
