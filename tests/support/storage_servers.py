"""Real servers of S3 (moto's) and of Google's storage on this machine, for tests: in memory, over HTTP."""

import logging
import zlib
from collections.abc import Generator

import fsspec
import pytest


@pytest.fixture(scope="session")
def s3_server() -> Generator[dict[str, str]]:
    """Start the server; return the environment with which boto, and so s3fs, finds it."""
    moto = pytest.importorskip("moto.server")
    pytest.importorskip("s3fs")
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = moto.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield {
        "AWS_ENDPOINT_URL": f"http://{host}:{port}",
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
    }
    server.stop()


@pytest.fixture
def bucket(s3_server, monkeypatch, request) -> str:
    """Return the address of an empty bucket of the test's own, with the environment set."""
    for name, value in s3_server.items():
        monkeypatch.setenv(name, value)
    name = f"test-{zlib.crc32(request.node.nodeid.encode())}"
    fs = fsspec.filesystem("s3", use_listings_cache=False)
    fs.mkdir(name)
    return f"s3://{name}"


@pytest.fixture
def google_bucket(monkeypatch) -> Generator[str]:
    """Start a server of Google's storage; return the address of its one bucket, with the environment set."""
    # Else gcsfs asks Google at each call what kind of bucket it is, finds no credentials, and logs a warning.
    monkeypatch.setenv("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")
    emulator = pytest.importorskip("gcp_storage_emulator.server")
    gcsfs = pytest.importorskip("gcsfs")
    # gcsfs writes LF, not CRLF, after a file: the server would take a CR that ends the file for a half of it.
    read = emulator._read_raw_data
    ended = lambda handler: (read(handler) or b"").replace(b"\n--==0==--", b"\r\n--==0==--")  # noqa: E731
    monkeypatch.setattr(emulator, "_read_raw_data", ended)
    server = emulator.create_server("127.0.0.1", 0, in_memory=True, default_bucket="box")
    server.start()
    http = server._api._httpd
    http.socket.listen(128)  # it lets five wait; a client's sixth is dropped and comes a second later, or is lost
    http.handle_error = lambda *_: None  # it prints a traceback for each connection that a client closes
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", f"http://127.0.0.1:{http.server_port}")
    gcsfs.GCSFileSystem.clear_instance_cache()
    yield "gs://box"
    gcsfs.GCSFileSystem.clear_instance_cache()
    server.stop()


@pytest.fixture
def quick_mirror(monkeypatch, fresh_notices) -> None:
    """A mirror looks for checkpoints at once, tries again soon, and says its notices anew."""
    from jdp.checkpoint import errors, mirror

    monkeypatch.setattr(mirror, "LOOK_SECONDS", 0.02)
    monkeypatch.setattr(errors, "_FIRST_PAUSE", 0.05)


def storage(address):
    """Return the file system and the path of an address, listed anew at each call."""
    return fsspec.core.url_to_fs(address, use_listings_cache=False)


def copies(address):
    """Return the steps with files in the mirror -> whether each is complete."""
    fs, root = storage(address)
    names = [path.removeprefix(f"{root}/").split("/", 1) for path in fs.find(root)]
    return {int(step): [step, "checksums.json"] in names for step, _ in names}


def whole(*steps):
    """Return these steps, complete, as `copies` does."""
    return dict.fromkeys(steps, True)
