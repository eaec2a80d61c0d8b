"""benchmarks/host.py on a CPU with a driver that does nothing: does it run? For test_native.py."""

import runpy
import sys
from pathlib import Path

from stubbed import stubbed

SCRIPT = Path(__file__).parent.parent.parent / "benchmarks" / "host.py"

if __name__ == "__main__":
    with stubbed() as noted:
        import tisa

        noted.quiet()
        sys.modules[tisa.attention.__module__].GPUS = ("cpu",)
        sys.argv = [str(SCRIPT), "--device", "cpu", "--driver", noted.library, *sys.argv[1:]]
        runpy.run_path(str(SCRIPT), run_name="__main__")
