"""TLS between the processes of one cluster: who has no certificate of this very start cannot even say hello.

`make_cluster_tls` makes an authority, lets it sign one certificate, and forgets the authority's key: so nobody, the
cluster included, can ever make another one that it would accept. All processes show the same certificate, for what they
have to prove is only that they belong here. It lasts as long as a service may; nothing is kept on disk.
"""

import datetime
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc

_NAME = "pagoda.cluster"
_LIFE = datetime.timedelta(days=3650)
_SKEW = datetime.timedelta(days=1)
"""Clocks of machines differ."""
Options = Sequence[tuple[str, Any]]


@dataclass(frozen=True, slots=True)
class ClusterTls:
    """What a process of the cluster needs, as PEM."""

    authority: bytes
    certificate: bytes
    key: bytes = field(repr=False)


def make_cluster_tls() -> ClusterTls:
    """For one start of a service. Takes a few milliseconds."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    now = datetime.datetime.now(datetime.UTC)

    def certificate(name: str, issuer: str, key: ec.EllipticCurvePublicKey) -> x509.CertificateBuilder:
        return (
            x509.CertificateBuilder()
            .subject_name(x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)]))
            .issuer_name(x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, issuer)]))
            .public_key(key)
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - _SKEW)
            .not_valid_after(now + _LIFE)
        )

    issuer, (authority_key, key) = f"{_NAME} authority", (ec.generate_private_key(ec.SECP256R1()) for _ in range(2))
    authority = (
        certificate(issuer, issuer, authority_key.public_key())
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(authority_key, hashes.SHA256())
    )
    own = (
        certificate(_NAME, issuer, key.public_key())
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(_NAME)]), critical=False)
        .sign(authority_key, hashes.SHA256())
    )
    return ClusterTls(
        authority.public_bytes(serialization.Encoding.PEM),
        own.public_bytes(serialization.Encoding.PEM),
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()),
    )


def dial(address: str, tls: ClusterTls | None, options: Options = ()) -> grpc.aio.Channel:
    """A channel to a process of the cluster; without `tls` anybody may read along."""
    if tls is None:
        return grpc.aio.insecure_channel(address, options=options)
    credentials = grpc.ssl_channel_credentials(tls.authority, tls.key, tls.certificate)
    return grpc.aio.secure_channel(address, credentials, options=[*options, ("grpc.ssl_target_name_override", _NAME)])


def listen(server: grpc.aio.Server, address: str, tls: ClusterTls | None) -> int:
    """Listen at host:port, port 0 for a free one; with `tls`, to processes of the cluster only. Returns the port."""
    if tls is None:
        return int(server.add_insecure_port(address))
    credentials = grpc.ssl_server_credentials(
        [(tls.key, tls.certificate)], root_certificates=tls.authority, require_client_auth=True
    )
    return int(server.add_secure_port(address, credentials))
