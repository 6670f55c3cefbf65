"""TLS of one cluster: a certificate authority of its own, and a certificate of its for each role.

Whoever holds a certificate of this authority may run code on the cluster; nobody else can connect. The files lie in a
directory that only its owner can read, are named by path, and are never part of a command line, a log or an event. A
worker on another host gets what it needs through its standard input (`bundle`).
"""

from __future__ import annotations

import argparse
import datetime
import ipaddress
import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from distributed.security import Security

from pearl.errors import UserError

CA, CERTIFICATE, KEY = "ca.pem", "{role}.pem", "{role}.key"
ROLES = ("scheduler", "worker", "client")
AUTHORITY = "ca"
"""Its key signs later certificates; it stays on the host that made it."""
VALID_S = 30 * 86400.0
"""A cluster that lives longer is started again."""
BACKDATED = datetime.timedelta(minutes=10)
"""Clocks of hosts differ."""
PRIVATE = 0o600


@dataclass(frozen=True, slots=True)
class Certificates:
    """A directory with `ca.pem`, and `<role>.pem` with `<role>.key` for the roles that this host plays."""

    directory: Path

    @classmethod
    def make(cls, directory: Path, valid_s: float = VALID_S) -> Certificates:
        """Those in `directory` (made if it is not there), with a new authority if they have none, or a past one."""
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        made = cls(directory)
        if not (directory / CA).exists() or _end(directory / CA) < _now():
            authority = _authority(valid_s)
            _write(directory / KEY.format(role=AUTHORITY), _pem(authority[0]))
            for role in ROLES:
                made._issue(role, authority, directory, valid_s)
            _write(directory / CA, authority[1].public_bytes(serialization.Encoding.PEM))  # last: now it is whole
        return made

    @classmethod
    def open(cls, directory: Path, role: str) -> Certificates:
        """Raises UserError if the files of `role` are not there or are none, its time is over, or others can read its
        key."""
        for name in (CA, CERTIFICATE.format(role=role), KEY.format(role=role)):
            if not (directory / name).is_file():
                raise UserError(
                    f"there is no TLS file {directory / name}",
                    "Copy the directory of the scheduler's host, or make one with "
                    f"`python -m pearl.cluster.certificates {directory}`.",
                )
        key = directory / KEY.format(role=role)
        if key.stat().st_mode & 0o077:
            raise UserError(f"others can read the key {key}", f"chmod 600 {key}")
        anew = "Make new ones with `python -m pearl.cluster.certificates DIRECTORY`, and start the cluster with them."
        try:
            end = min(_end(directory / name) for name in (CA, CERTIFICATE.format(role=role)))
            cls(directory).security().get_connection_args(role)  # OpenSSL reads them
        except (OSError, ValueError) as error:
            raise UserError(f"the TLS files of the {role} in {directory} cannot be used ({error})", anew) from None
        if end < _now():
            raise UserError(f"the TLS certificates in {directory} ended at {end:%Y-%m-%d %H:%M} UTC", anew)
        return cls(directory)

    def issue(self, role: str, directory: Path, valid_s: float) -> Certificates:
        """One more certificate of this authority, valid for `valid_s`, in `directory`: for a machine that comes and
        goes, so that what it is given is worth nothing after it. Raises OSError where the authority's key is not."""
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        key = serialization.load_pem_private_key((self.directory / KEY.format(role=AUTHORITY)).read_bytes(), None)
        assert isinstance(key, ec.EllipticCurvePrivateKey)
        authority = x509.load_pem_x509_certificate((self.directory / CA).read_bytes())
        self._issue(role, (key, authority), directory, valid_s)
        _write(directory / CA, (self.directory / CA).read_bytes())
        return Certificates(directory)

    def copy(self, role: str, directory: Path) -> None:
        """What `role` needs, for hosts that share that directory with this one."""
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        for name in (CA, CERTIFICATE.format(role=role), KEY.format(role=role)):
            _write(directory / name, (self.directory / name).read_bytes())

    def security(self) -> Security:
        """For all roles whose files are here."""
        files: dict[str, str] = {}
        for role in ROLES:
            certificate, key = self.directory / CERTIFICATE.format(role=role), self.directory / KEY.format(role=role)
            if certificate.exists() and key.exists():
                files |= {f"tls_{role}_cert": str(certificate), f"tls_{role}_key": str(key)}
        return Security(tls_ca_file=str(self.directory / CA), require_encryption=True, **files)

    def bundle(self) -> bytes:
        """What a worker reads from its standard input (`--tls -`): one line of JSON. Not to be logged."""
        names = {"ca": CA, "certificate": CERTIFICATE.format(role="worker"), "key": KEY.format(role="worker")}
        return json.dumps({what: (self.directory / name).read_text() for what, name in names.items()}).encode() + b"\n"

    def _issue(
        self,
        role: str,
        authority: tuple[ec.EllipticCurvePrivateKey, x509.Certificate],
        directory: Path,
        valid_s: float,
    ) -> None:
        key = ec.generate_private_key(ec.SECP256R1())
        builder = _builder(f"pearl {role}", authority[1].subject, key, valid_s)
        certificate = builder.sign(authority[0], hashes.SHA256())
        _write(directory / KEY.format(role=role), _pem(key))
        _write(directory / CERTIFICATE.format(role=role), certificate.public_bytes(serialization.Encoding.PEM))


def worker_security(bundle: bytes) -> Security:
    """From a line of `Certificates.bundle`. It stays in memory (OpenSSL reads it from a private file, for a moment)."""
    parts = json.loads(bundle)
    return Security(
        tls_ca_file=parts["ca"],
        tls_worker_cert=parts["certificate"],
        tls_worker_key=parts["key"],
        require_encryption=True,
    )


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach `host`."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def require_encryption(host: str, encrypted: bool, insecure: bool) -> None:
    """Raises UserError for a scheduler beyond loopback that anybody could give code to run."""
    if not (encrypted or insecure or is_loopback(host)):
        raise UserError(
            f"a Dask scheduler at {host} without TLS runs the code of whoever reaches it",
            "Give cluster.tls_directory, or set cluster.insecure to true if nobody else can reach that network.",
        )


def _authority(valid_s: float) -> tuple[ec.EllipticCurvePrivateKey, x509.Certificate]:
    key = ec.generate_private_key(ec.SECP256R1())
    name = _name(f"pearl cluster {os.urandom(4).hex()}")
    builder = _builder(None, name, key, valid_s).add_extension(x509.BasicConstraints(ca=True, path_length=0), True)
    return key, builder.sign(key, hashes.SHA256())


def _builder(
    subject: str | None, issuer: x509.Name, key: ec.EllipticCurvePrivateKey, valid_s: float
) -> x509.CertificateBuilder:
    now = _now()
    return (
        x509.CertificateBuilder()
        .subject_name(_name(subject) if subject else issuer)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - BACKDATED)
        .not_valid_after(now + datetime.timedelta(seconds=valid_s))
    )


def _now() -> datetime.datetime:
    return datetime.datetime.now(datetime.UTC)


def _end(certificate: Path) -> datetime.datetime:
    return x509.load_pem_x509_certificate(certificate.read_bytes()).not_valid_after_utc


def _name(common: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common)])


def _pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def _write(path: Path, content: bytes) -> None:
    """Readable by its owner alone from the first byte on; whole or not there."""
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    with os.fdopen(os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, PRIVATE), "wb") as file:
        file.write(content)
    unfinished.replace(path)


def main() -> None:
    parser = argparse.ArgumentParser(description="Make the TLS certificates of a cluster, unless they are there.")
    parser.add_argument("directory", type=Path, help="where they are to lie; made if it is not there")
    directory = parser.parse_args().directory
    try:
        print(Certificates.make(directory).directory)
    except (OSError, ValueError) as error:
        sys.exit(f"error: no certificates can be made in {directory} ({error}). Give a directory that you can write.")


if __name__ == "__main__":
    main()
