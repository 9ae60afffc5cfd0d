"""Peak memory of this process since a mark, from Linux's own counter."""

from pathlib import Path

_CLEAR, _STATUS = Path("/proc/self/clear_refs"), Path("/proc/self/status")
_RESET_PEAK = "5"  # proc(5): resets the peak resident set size


def reset_peak_memory() -> None:
    """Sets the mark: the peak falls to what is resident now."""
    _CLEAR.write_text(_RESET_PEAK)


def peak_memory_mb() -> float:
    """The largest resident set since the mark, in MiB: weights, gradients and optimizer state included."""
    line = next(line for line in _STATUS.read_text().splitlines() if line.startswith("VmHWM:"))
    return int(line.split()[1]) / 1024
