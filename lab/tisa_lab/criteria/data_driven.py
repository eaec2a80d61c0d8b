"""Data-driven: does training change how position is represented?"""

from tisa_lab.criteria.draws import random_content, random_transformer
from tisa_lab.criteria.measurement import Measurement
from tisa_lab.criteria.settings import Settings


def measure(name: str, settings: Settings) -> Measurement:
    """Return how many positional parameters a loss on the outputs gives a gradient to."""
    model = random_transformer(name, settings, seed=0)
    length = settings.training_length
    output = model(inputs_embeds=random_content(settings, 2, length, seed=1))
    wanted = random_content(settings, 2, length, seed=2)
    (output - wanted).square().mean().backward()
    parameters = list(model.position.parameters())
    reached = sum(int((p.grad != 0).sum()) for p in parameters if p.grad is not None)
    total = sum(p.numel() for p in parameters)
    return Measurement(
        float(reached), f"{reached:,} of {total:,} positional parameters receive a gradient"
    )
