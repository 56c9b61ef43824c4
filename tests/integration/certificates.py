"""Authorities and certificates for tests of TLS."""

import datetime
import ipaddress
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec


class Authority:
    """Signs certificates, all of them for 127.0.0.1; its own lies in `path`."""

    def __init__(self, folder: Path, name: str) -> None:
        self._folder = folder
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = name
        self.path = folder / f"{name}.pem"
        self.path.write_bytes(self._sign(name, self._key, is_authority=True))

    def issue(self, name: str) -> tuple[Path, Path]:
        """A certificate and its key. One of the same name is written over."""
        key = ec.generate_private_key(ec.SECP256R1())
        certificate_path, key_path = self._folder / f"{name}.crt", self._folder / f"{name}.key"
        certificate_path.write_bytes(self._sign(name, key, is_authority=False))
        key_path.write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
            )
        )
        return certificate_path, key_path

    def _sign(self, name: str, key: ec.EllipticCurvePrivateKey, *, is_authority: bool) -> bytes:
        now = datetime.datetime.now(datetime.UTC)

        def named(common_name: str) -> x509.Name:
            return x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, common_name)])

        builder = (
            x509.CertificateBuilder()
            .subject_name(named(name))
            .issuer_name(named(self._name))
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(days=1))
            .not_valid_after(now + datetime.timedelta(days=1))
            .add_extension(x509.BasicConstraints(ca=is_authority, path_length=None), critical=True)
        )
        if is_authority:
            usage = x509.KeyUsage(*(name in ("key_cert_sign", "digital_signature") for name in _USES))
            builder = builder.add_extension(usage, critical=True)
            builder = builder.add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        else:
            names = [x509.IPAddress(ipaddress.ip_address("127.0.0.1")), x509.DNSName("localhost")]
            builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
            builder = builder.add_extension(
                x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key()), critical=False
            )
        return builder.sign(self._key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)


_USES = (
    "digital_signature",
    "content_commitment",
    "key_encipherment",
    "data_encipherment",
    "key_agreement",
    "key_cert_sign",
    "crl_sign",
    "encipher_only",
    "decipher_only",
)
