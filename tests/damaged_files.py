"""Damage to files, as disks, crashes and people make it."""

from jdp.checkpoint.format import checksums


def flip(file, position, bit=0):
    """Flip one bit of the byte at `position`."""
    with file.open("r+b") as stream:
        stream.seek(position)
        byte = stream.read(1)[0]
        stream.seek(position)
        stream.write(bytes([byte ^ (1 << bit)]))


def zero_page(file, position, size=4096):
    """Write zeros over the page that `position` is in."""
    start = position // size * size
    with file.open("r+b") as stream:
        stream.seek(start)
        stream.write(bytes(min(size, file.stat().st_size - start)))


def cut(file):
    """Lose the second half."""
    with file.open("r+b") as stream:
        stream.truncate(file.stat().st_size // 2)


def vouch(step):
    """Write a checkpoint's checksums anew, so that what was changed in it is taken for what was saved."""
    checksums.commit(step, checksums.hash_share(step, 0, 1))
