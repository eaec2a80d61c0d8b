"""How large the demo is: minutes on two cores, or a quick form that only shows that it runs."""

from dataclasses import dataclass

from tisa.packages import device_named

# What to do where something that the demo kept is damaged.
AGAIN = "remove the folder that it lies in to begin anew"


@dataclass(frozen=True)
class Settings:
    """Sizes of all chapters.

    fit_texts: sentences that kernels are fitted on, and num_kernels per head. distil_steps: of
    distillation. held_out and deeds: sentences and pairs that are measured. race_*: of the race on
    the probes. criteria_methods: rows of Table 1, () for all. training_steps: of the small model
    that stands in where no pretrained one can be had.
    """

    seed: int = 0
    device: str | None = None
    quick: bool = False
    fit_texts: int = 64
    num_kernels: int = 5
    distil_steps: int = 30
    held_out: int = 40
    deeds: int = 24
    race_methods: tuple[str, ...] = (
        "none", "absolute", "rotary", "t5", "alibi", "tisa", "near-far",
    )  # fmt: skip
    race_tasks: tuple[str, ...] = ("find", "reverse")
    race_steps: int = 250
    race_length: int = 24
    criteria_methods: tuple[str, ...] = ()
    training_steps: int = 1200

    def __post_init__(self) -> None:
        # As it is found here: the record says where the demo ran.
        object.__setattr__(self, "device", str(device_named(self.device)))


def quick(seed: int = 0, device: str | None = None) -> Settings:
    """Return the quick form: everything runs, and its numbers say little."""
    return Settings(
        seed=seed,
        device=device,
        quick=True,
        fit_texts=12,
        num_kernels=2,
        distil_steps=4,
        held_out=8,
        deeds=6,
        race_methods=("none", "tisa"),
        race_tasks=("find",),
        race_steps=20,
        race_length=12,
        criteria_methods=("absolute", "t5", "tisa"),
        training_steps=30,
    )
