"""Up to which length a converted model may take the original's place, by what was measured of it.

The cosine of both models' mean hidden states says how near one is to the other, not how good either
is at a task. No length is called free, and of lengths that were not measured nothing is said.
"""

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

# The cosine at every length measured, up to some length.
KEPT, RECOMMENDED = 0.98, 0.95
MEASURED = re.compile(r"cosine to original at (\d+) tokens")


class Verdict(NamedTuple):
    """The mean cosine to the original by length in tokens, and how many tokens the model takes.

    `limit` is None where it takes any number of them.
    """

    cosines: dict[int, float]
    limit: int | None

    @classmethod
    def of(cls, after: Mapping[str, float], limit: int | None) -> "Verdict":
        """Return the verdict on what `measure.measurements` found."""
        found = {int(m[1]): value for name, value in after.items() if (m := MEASURED.match(name))}
        return cls(dict(sorted(found.items())), limit)

    @classmethod
    def read(cls, written: Mapping[str, Any]) -> "Verdict":
        """Return what was written into a config, whose lengths are words."""
        cosines = {int(length): value for length, value in written["cosines"].items()}
        return cls(dict(sorted(cosines.items())), written["limit"])

    def written(self) -> dict[str, Any]:
        """Return it as a config has it."""
        return {
            "cosines": {str(length): round(value, 4) for length, value in self.cosines.items()},
            "limit": self.limit,
        }

    def up_to(self, least: float) -> int | None:
        """Return the longest length up to which every one measured has this cosine, or None."""
        found = None
        for length, value in self.cosines.items():
            if not value >= least:
                break
            found = length
        return found

    def told(self) -> list[str]:
        """Return the verdict in sentences, one for each thing that is said."""
        if not self.cosines:
            return [
                "No length was measured, so none is recommended; `tisa convert --report` measures."
            ]
        each = ", ".join(f"{value:.4f} at {length:,}" for length, value in self.cosines.items())
        said = [f"Cosine to the original by length in tokens: {each}."]
        kept, recommended = self.up_to(KEPT), self.up_to(RECOMMENDED)
        if kept is not None:
            said.append(
                f"Kept up to {kept:,} tokens: at least {KEPT} at each length measured until there."
            )
        longest = max(self.cosines)
        if recommended is None:
            said.append(
                f"No length is recommended: the cosine is below {RECOMMENDED} at the shortest one. "
                'positions="extend", text to fit on like that the model will see, or distillation '
                "may bring it nearer."
            )
        else:
            said.append(
                f"Recommended up to {recommended:,} tokens: at least {RECOMMENDED} at each length "
                "measured until there. Beyond that, cut a text into pieces of at most "
                f"{recommended:,} tokens."
            )
        if self.limit is not None:
            said.append(f"The model takes no more than {self.limit:,} tokens.")
        else:
            said.append(
                f"Nothing was measured beyond {longest:,} tokens; `tisa-lab long` measures there, "
                "beside pieces."
            )
        return said
