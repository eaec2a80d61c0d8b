"""Table 1 as it was printed (Wennberg & Henter, ACL 2021)."""

CRITERIA = (
    "inductive",
    "data-driven",
    "parameter efficient",
    "translation invariant",
    "parallelizable",
    "interpretable",
)

# The row's name, the method here that stands for it, and its six marks. Two rows have several
# forms, and which one stands for it was settled before anything was measured: the Synthesizer's
# random form, the simplest, and TUPE-A, of which TUPE-R is a mixture with T5.
TABLE_1: dict[str, tuple[str, str]] = {
    "Sinusoidal": ("sinusoidal", "✓✗✓✗✓✗"),
    "Absolute": ("absolute", "✗✓✗✗✓✗"),
    "Relative (Shaw)": ("shaw", "✗✓✓✓✗✗"),
    "T5": ("t5", "✗✓✓✓✓✓"),
    "Flow-based (FLOATER)": ("floater", "✓✓✓✗✗✗"),
    "Synthesizer": ("synthesizer-random", "✗✓✓✗✓✗"),
    "Untied (TUPE)": ("tupe-a", "✗✓✗✗✓✗"),
    "Rotary": ("rotary", "✓✗✓✓✓✗"),
    "TISA": ("tisa", "✓✓✓✓✓✓"),
}


def claims() -> dict[str, dict[str, bool]]:
    """Return the paper's mark for each method here and each criterion."""
    return {
        method: {c: mark == "✓" for c, mark in zip(CRITERIA, marks, strict=True)}
        for method, marks in TABLE_1.values()
    }


def row_name(method: str) -> str:
    """Return the row of Table 1 that a method stands for, or its own name."""
    return next((row for row, (name, _) in TABLE_1.items() if name == method), method)
