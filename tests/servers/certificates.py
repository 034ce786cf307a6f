"""Certificates for servers of the tests, from an authority of their own."""

from __future__ import annotations

import datetime
import ipaddress
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec


class Authority:
    """Signs certificates of 127.0.0.1; its own is ``ca.pem`` in the folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._folder.mkdir(parents=True, exist_ok=True)
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, f"authority {folder.name}")])
        self.certificate = self._folder / "ca.pem"
        self._write(self.certificate, self._name, self._key, is_authority=True)

    def issue(self, name: str) -> tuple[Path, Path]:
        """A certificate and its key, ``name.pem`` and ``name-key.pem`` in the folder."""
        key = ec.generate_private_key(ec.SECP256R1())
        certificate, key_file = self._folder / f"{name}.pem", self._folder / f"{name}-key.pem"
        subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
        self._write(certificate, subject, key, is_authority=False)
        pem, pkcs8, plain = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        key_file.write_bytes(key.private_bytes(pem, pkcs8, plain))
        return certificate, key_file

    def _write(self, path: Path, subject: x509.Name, key: ec.EllipticCurvePrivateKey, *, is_authority: bool) -> None:
        now = datetime.datetime.now(datetime.UTC)
        address = x509.IPAddress(ipaddress.ip_address("127.0.0.1"))
        usages = [x509.ExtendedKeyUsageOID.SERVER_AUTH, x509.ExtendedKeyUsageOID.CLIENT_AUTH]
        builder = (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(hours=1))
            .not_valid_after(now + datetime.timedelta(days=1))
            .add_extension(x509.BasicConstraints(ca=is_authority, path_length=None), critical=True)
            # Python 3.13 and newer refuse certificates without what follows.
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key()), critical=False)
        )
        if is_authority:
            unused = dict.fromkeys(
                (
                    *("digital_signature", "content_commitment", "key_encipherment", "data_encipherment"),
                    *("key_agreement", "encipher_only", "decipher_only"),
                ),
                False,
            )
            signs = x509.KeyUsage(key_cert_sign=True, crl_sign=True, **unused)
            builder = builder.add_extension(signs, critical=True)
        else:
            builder = builder.add_extension(x509.SubjectAlternativeName([address]), critical=False)
            builder = builder.add_extension(x509.ExtendedKeyUsage(usages), critical=False)
        path.write_bytes(builder.sign(self._key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM))
