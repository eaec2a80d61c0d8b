"""A forward pass of a converted model can be followed in few files; this test prints which."""

import sys
from pathlib import Path

import torch

import tisa.hf
from tiny import inputs, original, token_lists

AT_MOST = 10


def test_a_forward_pass_goes_through_few_files(capsys):
    model = tisa.hf.convert(original("bert"), init="zero", calibration=token_lists())
    package = Path(tisa.__file__).parent
    passed = set()

    def look(frame, event, argument):
        if event == "call":
            passed.add(frame.f_code.co_filename)

    sys.setprofile(look)
    try:
        with torch.no_grad():
            model(**inputs())
    finally:
        sys.setprofile(None)
    files = sorted(
        str(Path(p).relative_to(package)) for p in passed if Path(p).is_relative_to(package)
    )
    with capsys.disabled():
        print(f"\n{len(files)} files in a forward pass of a converted model: {', '.join(files)}")
    assert files[:2] == ["hf/core.py", "hf/implementations.py"]
    assert len(files) <= AT_MOST
