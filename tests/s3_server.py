"""A real server of S3 on this machine, moto's, for tests: buckets in memory, over HTTP, one server a session."""

import logging
from collections.abc import Generator

import pytest


@pytest.fixture(scope="session")
def s3_server() -> Generator[dict[str, str]]:
    """Start the server; return the environment with which boto, and so s3fs, finds it."""
    server_module = pytest.importorskip("moto.server")
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = server_module.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
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
    """Return the address of a bucket of the test's own, s3://…, with the environment set."""
    import fsspec

    for name, value in s3_server.items():
        monkeypatch.setenv(name, value)
    fs = fsspec.filesystem("s3", use_listings_cache=False)
    name = f"test-{abs(hash(request.node.nodeid)) % 10**12}"
    fs.mkdir(name)
    return f"s3://{name}"
