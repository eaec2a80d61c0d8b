"""What is asked of `tisa-lab long`, and its sizes."""

from dataclasses import dataclass
from typing import Literal, get_args

Task = Literal["passkey", "needle", "article", "article, last eighth", "article, removed"]
TASKS: tuple[Task, ...] = get_args(Task)
# The words of the command line, where a name holds no comma.
FAMILIES = {
    "passkey": TASKS[:1], "needle": TASKS[1:2],
    "article": TASKS[2:3], "eighth": TASKS[3:4], "removed": TASKS[4:5],
}  # fmt: skip
HAYSTACKS = ("filler", "articles")


@dataclass(frozen=True)
class LongConfig:
    """Sizes of a comparison over long texts.

    Args:
        lengths: Tokens of the documents, the model's special tokens included.
        tasks: Of passkey, needle, article, eighth (asked from its last eighth) and removed (without
            the sentence that is asked for).
        haystacks: What passkeys and needles lie in: filler, a few sentences over and over; or
            articles, sentences of articles that nothing else asks for.
        documents: Articles to choose from, and documents of each passkey and needle task.
        queries: Sentences that are asked for of each article.
        seeds: Each draws places, names and sentences of its own.
        chunk: Tokens of a piece, and of what one vector of several stands for.
        converted: What is converted: replace, extend, with options of `convert` after colons
            (extend:num_places=20), or the folder of a converted model.
        calibration: Pieces of other articles that scores are fitted to.
        query_prefix: Words before every query, where the model wants some.
        document_prefix: Words before every document and every piece.
        batch_tokens: Tokens read at once.
        bf16: Whether products are in bfloat16.
        seed: Of the pieces that scores are fitted to.
    """

    lengths: tuple[int, ...] = (256, 512, 1024, 2048)
    tasks: tuple[str, ...] = tuple(FAMILIES)
    haystacks: tuple[str, ...] = HAYSTACKS
    documents: int = 40
    queries: int = 4
    seeds: tuple[int, ...] = (0,)
    chunk: int = 128
    converted: tuple[str, ...] = ("replace", "extend")
    calibration: int = 96
    query_prefix: str = ""
    document_prefix: str = ""
    batch_tokens: int = 16384
    bf16: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        for name, known in (("tasks", tuple(FAMILIES)), ("haystacks", HAYSTACKS)):
            given = getattr(self, name)
            unknown = [word for word in given if word not in known]
            if unknown or not given:
                raise ValueError(
                    f"{name} must be some of {', '.join(known)}, got {', '.join(unknown) or 'none'}"
                )
        if not self.lengths or min(self.lengths) < 128 or max(self.lengths) > 2**17:
            raise ValueError(
                f"lengths must be whole numbers from 128 to {2**17}, got {self.lengths}"
            )
        for name, least in (
            ("documents", 2), ("queries", 1), ("chunk", 32), ("batch_tokens", 1),
            ("calibration", 8),
        ):  # fmt: skip
            if getattr(self, name) < least:
                raise ValueError(f"{name} must be at least {least}, got {getattr(self, name)}")
        if not self.seeds:
            raise ValueError("seeds must be one or more, got none")

    @property
    def asked(self) -> tuple[Task, ...]:
        """Return the tasks by their own names, each once."""
        return tuple(dict.fromkeys(name for task in self.tasks for name in FAMILIES[task]))
