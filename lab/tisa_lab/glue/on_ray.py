"""Where cells are run: on the machines of a Ray cluster, each cell in a process of a worker.

Workers need this package, the model and the data under the same names as here; nothing of the
folder of records. What cells start from travels with them, and comes back where it was made anew.
"""

import os
import tempfile
import time
from pathlib import Path
from typing import Any

import tisa
from tisa_lab.glue.cell import Cell
from tisa_lab.glue.executors import Finished, Lost, Settings, outcome
from tisa_lab.glue.record import Record

# Content of a folder of starts by the names of the files.
Files = dict[str, bytes]


class OnRay:
    """So many cells side by side on a cluster; a cell whose worker is lost is run again.

    Args:
        settings: as everywhere.
        address: of the cluster ("host:port", "auto"); None starts one on this machine.
        workers: cells at a time. GPUs are shared out among them, a whole one to each at most.
    """

    def __init__(self, settings: Settings, address: str | None, workers: int) -> None:
        if workers < 1:
            raise ValueError(f"workers: expected at least 1, got {workers}")
        self.settings = settings
        self.workers = workers
        self._ray = _connected(address, workers)
        self._running: dict[Any, Cell] = {}
        gpus = 0.0
        if settings.device != "cpu":
            gpus = min(1.0, self._ray.cluster_resources().get("GPU", 0.0) / workers)
        # Lost workers are the sweep's matter: it counts tries, and its view tells of them.
        self._there = self._ray.remote(num_cpus=1, num_gpus=gpus, max_retries=0)(_there)

    def free(self) -> int:
        """Return how many more cells may be given to the cluster."""
        return self.workers - len(self._running)

    def submit(self, cell: Cell) -> None:
        """Give a cell to the cluster."""
        import torch

        files = _files(self.settings.starts) if cell.init == "fit" else {}
        # Threads as here: sums in another order would be other numbers.
        given = (cell, self.settings, files, torch.get_num_threads(), os.getcwd(), tisa.__version__)
        self._running[self._there.options(name=f"tisa {cell.key}").remote(*given)] = cell

    def collect(self) -> list[Finished]:
        """Return the cells that have ended; those of a worker that was lost are tried again."""
        if not self._running:
            time.sleep(0.2)
            return []
        ended, _ = self._ray.wait(list(self._running), num_returns=1, timeout=0.5)
        finished: list[Finished] = []
        for reference in ended:
            cell = self._running.pop(reference)
            try:
                found, files = self._ray.get(reference)
            except self._ray.exceptions.RayTaskError as wrong:
                finished.append((cell, RuntimeError(f"on its worker: {wrong.cause!r}")))
            except self._ray.exceptions.RayError as lost:
                finished.append((cell, Lost(f"{type(lost).__name__}: {_first_line(lost)}")))
            else:
                _keep(files, self.settings.starts)
                finished.append((cell, found))
        return finished

    def close(self) -> None:
        """End what runs, and leave the cluster."""
        for reference in self._running:
            self._ray.cancel(reference, force=True)
        self._running.clear()
        self._ray.shutdown()


def _connected(address: str | None, workers: int) -> Any:
    try:
        import ray
    except ModuleNotFoundError as missing:
        raise ModuleNotFoundError(
            "--executor ray needs the package ray: pip install 'tisa-lab[cluster]'"
        ) from missing
    told: dict[str, Any] = {"log_to_driver": False, "logging_level": "error"}
    if address is None:
        ray.init(address="local", num_cpus=workers, include_dashboard=False, **told)
        return ray
    try:
        ray.init(address=address, **told)
    except (ConnectionError, ValueError, RuntimeError) as wrong:
        raise ValueError(
            f"--address: expected a running Ray cluster (host:port, auto), got {address!r}: "
            f"{_first_line(wrong)}; start one with `ray start --head`, or leave --address out"
        ) from wrong
    return ray


def _there(
    cell: Cell, settings: Settings, files: Files, threads: int, folder_here: str, version: str
) -> tuple[Record | Exception, Files]:
    """Return a cell's outcome and the starts that were made for it; runs on a worker."""
    import torch

    if tisa.__version__ != version:
        told = f"a worker has tisa {tisa.__version__}, expected {version}; install it there"
        return RuntimeError(told), {}
    torch.set_num_threads(threads)
    if os.path.isdir(folder_here):
        # Names of models and data may be relative to it.
        os.chdir(folder_here)
    with tempfile.TemporaryDirectory() as folder:
        _keep(files, folder)
        there = Settings(settings.data_dir, settings.device, folder)
        found = outcome(cell, there, None)
        made = _files(folder)
    return found, {name: made[name] for name in made.keys() - files.keys()}


def _files(folder: str | Path | None) -> Files:
    if folder is None:
        return {}
    return {path.name: path.read_bytes() for path in Path(folder).glob("*.safetensors")}


def _keep(files: Files, folder: str | Path | None) -> None:
    """Write files that are not there yet, each whole or not at all."""
    for name, content in files.items() if folder is not None else ():
        path = Path(str(folder)) / name
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            unfinished = path.with_suffix(".arrived")
            unfinished.write_bytes(content)
            unfinished.replace(path)


def _first_line(wrong: Exception) -> str:
    return (str(wrong).strip().splitlines() or [""])[0]
