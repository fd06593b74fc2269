"""Bytes, seconds and shares as people read them."""


def size(count: float) -> str:
    """Bytes, in powers of 1024: "31.2 GiB", "640 KiB"."""
    for unit, name in ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if abs(count) >= unit:
            return f"{count / unit:.3g} {name}" if abs(count) < 1000 * unit else f"{count / unit:.0f} {name}"
    return f"{count:.0f} B"


def duration(seconds: float) -> str:
    """Seconds: "1.24 s", "87.3 ms", "40 µs"."""
    for unit, name in ((1.0, "s"), (1e-3, "ms")):
        if abs(seconds) >= unit:
            return f"{seconds / unit:.3g} {name}" if abs(seconds) < 1000 * unit else f"{seconds / unit:.0f} {name}"
    return f"{seconds * 1e6:.3g} µs"


def share(fraction: float) -> str:
    """A fraction as per cent: "87 %", and "0.4 %" where it is small."""
    return f"{100 * fraction:.0f} %" if fraction >= 0.0995 or fraction == 0 else f"{100 * fraction:.1f} %"


def rate(per_second: float) -> str:
    """12345 -> "12.3k"."""
    for unit, name in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if per_second >= unit:
            return f"{per_second / unit:.3g}{name}"
    return f"{per_second:.3g}"
