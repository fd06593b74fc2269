"""Mutual TLS of JAX's coordination service, with certificates made on the spot: checked first, or refused in words."""

import datetime
import ipaddress
import os
import re
import sys
from pathlib import Path

import jax
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from jdp.core.cluster import tls
from jdp.core.cluster.initialize import initialize
from jdp.launch import launch

ROOT = Path(__file__).parents[2]
NOW = datetime.datetime.now(datetime.UTC)
DAY = datetime.timedelta(days=1)


class Authority:
    """A certificate authority of its own, which keeps its files in a folder."""

    def __init__(self, folder, name):
        self.folder, self.key = folder, ec.generate_private_key(ec.SECP256R1())
        self.name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
        own = self._builder(self.name, self.key, NOW + DAY)
        own = own.add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        self.file = self._write(f"{name}.pem", own.sign(self.key, hashes.SHA256()))

    def issue(self, name, *hosts, until=NOW + DAY):
        """Return the files of a certificate and of its key, for these hosts and the URI spiffe://jdp/NAME."""
        key = ec.generate_private_key(ec.SECP256R1())
        names = [x509.UniformResourceIdentifier(f"spiffe://jdp/{name}")]
        names += [x509.IPAddress(ipaddress.ip_address(host)) for host in hosts]
        subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
        builder = self._builder(subject, key, until).add_extension(x509.SubjectAlternativeName(names), critical=False)
        secret = self.folder / f"{name}.key"
        form = serialization.PrivateFormat.PKCS8
        secret.write_bytes(key.private_bytes(serialization.Encoding.PEM, form, serialization.NoEncryption()))
        return self._write(f"{name}.pem", builder.sign(self.key, hashes.SHA256())), str(secret)

    def _builder(self, subject, key, until):
        builder = x509.CertificateBuilder().subject_name(subject).issuer_name(self.name).public_key(key.public_key())
        builder = builder.serial_number(x509.random_serial_number())
        return builder.not_valid_before(NOW - 2 * DAY).not_valid_after(until)

    def _write(self, name, certificate):
        path = self.folder / name
        path.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
        return str(path)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """The variables of each kind of node."""
    folder = tmp_path_factory.mktemp("certificates")
    ours, theirs = Authority(folder, "ours"), Authority(folder, "theirs")
    node, other = ours.issue("node", "127.0.0.1"), ours.issue("elsewhere", "192.0.2.1")
    kinds = {"node": node, "elsewhere": other, "stranger": theirs.issue("stranger", "127.0.0.1")}
    kinds |= {"old": ours.issue("old", "127.0.0.1", until=NOW - DAY), "another key": (node[0], other[1])}
    kinds |= {"no file": (f"{folder}/nowhere.pem", node[1]), "no certificate": (node[1], node[1])}
    return {kind: dict(zip(tls.FILES, (*own, ours.file), strict=True)) for kind, own in kinds.items()}


@pytest.fixture
def known_to_jax(monkeypatch):
    """As JAX 0.12, whatever is installed."""
    monkeypatch.setattr(tls, "jax_has_it", lambda: True)
    monkeypatch.setattr(tls, "_setting", lambda name: os.environ.get(name, ""))


def check(monkeypatch, variables, *, first=True):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    tls.check_tls("127.0.0.1:1", first=first)


def test_files_that_fit_are_taken(files, monkeypatch, known_to_jax):
    check(monkeypatch, {})
    check(monkeypatch, files["elsewhere"], first=False)
    check(monkeypatch, files["node"])
    check(monkeypatch, files["elsewhere"] | {tls.PREFIX: "spiffe://jdp/"})


REFUSED = {
    "elsewhere": "not valid for '127.0.0.1'. Add 127.0.0.1 to its subjectAltName, or set JAX_MTLS_PEER_URI_PREFIX",
    "stranger": "stranger.pem: unable to get local issuer certificate. Make one that is signed by ",
    "old": "old.pem: certificate has expired",
    "another key": "KEY_VALUES_MISMATCH. Make one that is signed by",
    "no file": "JAX_MTLS_CERT_FILE names a file; given ",
    "no certificate": "Each process has a certificate that the others can verify; given ",
}


@pytest.mark.parametrize("kind", REFUSED)
def test_files_that_do_not_fit_are_refused_before_jax_waits(kind, files, monkeypatch, known_to_jax):
    with pytest.raises(ValueError, match=re.escape(REFUSED[kind])):
        check(monkeypatch, files[kind])


def test_half_of_the_settings_and_names_that_fit_nobody_are_refused(files, monkeypatch, known_to_jax):
    with pytest.raises(ValueError, match="Set JAX_MTLS_KEY_FILE and JAX_MTLS_CA_FILE too"):
        check(monkeypatch, {tls.CERT: files["node"][tls.CERT]})
    for prefix in ("spiffe://else/", "spiffe://jdp"):
        with pytest.raises(ValueError, match="ends with / and begins a URI of each certificate"):
            check(monkeypatch, files["node"] | {tls.PREFIX: prefix})
    for name in tls.FILES:
        monkeypatch.delenv(name)
    with pytest.raises(ValueError, match="given JAX_DISTRIBUTED_VERIFY_SECURE_CREDENTIALS alone"):
        check(monkeypatch, {tls.ENFORCED: "1", tls.PREFIX: ""})


@pytest.mark.skipif(tls.jax_has_it(), reason="about JAX before 0.12")
@pytest.mark.parametrize("name", [tls.CERT, tls.PREFIX, tls.ENFORCED])
def test_a_jax_that_would_ignore_it_is_refused_in_words(name, monkeypatch):
    monkeypatch.setenv(name, "1")
    with pytest.raises(ValueError, match=rf"needs JAX 0.12 or later; given {name} with JAX {jax.__version__}, which"):
        initialize("127.0.0.1:1", 2, 0)
    initialize("127.0.0.1:1", 1, 0)


JOIN = """
import os, socket, ssl, jax, jdp
jdp.initialize(timeout_seconds=60)
def answers(*certificate):  # gRPC speaks first, to whom it trusts
    host, port = os.environ["JDP_COORDINATOR"].split(":")
    context = ssl._create_unverified_context()
    context.set_alpn_protocols(["h2"])
    if certificate:
        context.load_cert_chain(*certificate)
    try:
        with context.wrap_socket(socket.create_connection((host, int(port)))) as connection:
            return bool(connection.recv(100))
    except (ssl.SSLError, ConnectionError):
        return False
if jax.process_index():
    own = [os.environ[f"JAX_MTLS_{name}_FILE"] for name in ("CERT", "KEY")]
    print("a node", answers(*own), "and a stranger", answers())
print("joined", jax.process_count(), len(jax.devices()))
"""


@pytest.mark.skipif(not tls.jax_has_it(), reason="about JAX 0.12 and later")
def test_processes_with_certificates_join_and_a_stranger_without_one_does_not(files, tmp_path, capfd):
    (tmp_path / "program.py").write_text(JOIN)
    environment = os.environ | {"PYTHONPATH": str(ROOT)} | files["node"]
    code = launch([sys.executable, str(tmp_path / "program.py")], 2, devices_per_process=1, environment=environment)
    out, err = capfd.readouterr()
    assert code == 0, err
    assert {"[0] joined 2 2", "[1] joined 2 2", "[1] a node True and a stranger False"} <= set(out.splitlines()), out
