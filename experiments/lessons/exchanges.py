"""Bytes and seconds, by formula, to add up N devices' arrays of M bytes: ring, naive exchange, parameter server."""


def formula(way: str, devices: int, size: float) -> float:
    """Bytes that a device sends, of an array of `size` bytes."""
    if way == "server":  # once, whatever the server sends
        return size
    return (devices - 1) * size * (1 if way == "naive" else 2 / devices)


def seconds(way: str, devices: int, size: float, latency: float, bandwidth: float) -> float:
    """Return α·2(N−1) + 2(N−1)/N·M/β for the ring, α·(N−1) + (N−1)·M/β naive, 2α + 2·N·M/β for a parameter server."""
    if way == "server":  # every device sends it M and gets M back, all over the server's one link
        return 2 * latency + 2 * devices * size / bandwidth
    steps = (devices - 1) * (1 if way == "naive" else 2)
    return latency * steps + formula(way, devices, size) / bandwidth


def size_where_equal(devices: int, latency: float, bandwidth: float) -> float:
    """Return the bytes below which the naive exchange is faster: αβ / (1 − 2/N)."""
    return latency * bandwidth / (1 - 2 / devices) if devices > 2 else float("inf")
