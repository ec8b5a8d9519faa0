"""TLS: what both ends make of certificates, and what an operator is told when it does not come about."""

import argparse
import os
import ssl
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self

from stagewatch.agents.credentials import check_private
from stagewatch.agents.errors import SettingsError

_UNKNOWN_SIGNER: Final = frozenset({18, 19, 20, 21})
_OTHER_NAME: Final = frozenset({62, 64})
_NO_TLS: Final = frozenset({"WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE", "PACKET_LENGTH_TOO_LONG"})
_CERTIFICATE_WANTED: Final = frozenset({"TLSV13_ALERT_CERTIFICATE_REQUIRED", "SSLV3_ALERT_HANDSHAKE_FAILURE"})
_CERTIFICATE_REFUSED: Final = frozenset(
    {
        "TLSV1_ALERT_UNKNOWN_CA",
        "SSLV3_ALERT_BAD_CERTIFICATE",
        "SSLV3_ALERT_CERTIFICATE_UNKNOWN",
        "SSLV3_ALERT_CERTIFICATE_EXPIRED",
        "SSLV3_ALERT_UNSUPPORTED_CERTIFICATE",
    }
)


@dataclass(frozen=True, slots=True)
class ClientTls:
    """What whoever connects to a collector brings to a TLS connection."""

    ca: Path | None = None
    """Whoever may have signed the collector's certificate; None for those the system trusts."""
    cert: Path | None = None
    """Our own certificate, for a collector that wants one; with its chain."""
    key: Path | None = None
    """Its private key; None if it is in the same file."""

    @classmethod
    def of(cls, args: argparse.Namespace) -> Self:
        """What the options of `add_tls_arguments` say."""
        return cls(args.tls_ca, args.tls_client_cert, args.tls_client_key)

    def context(self) -> ssl.SSLContext:
        """A context of the files as they are now. Raises SettingsError."""
        context = ssl.create_default_context(ssl.Purpose.SERVER_AUTH)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        if self.ca is not None:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            context.minimum_version = ssl.TLSVersion.TLSv1_2
            trust(context, self.ca, "--tls-ca")
        if self.cert is not None:
            load_identity(context, self.cert, self.key, "--tls-client-cert", "--tls-client-key")
        elif self.key is not None:
            raise SettingsError("--tls-client-key without --tls-client-cert: give both")
        return context


NO_TLS_FILES: Final = ClientTls()
"""What the system trusts, and no certificate of ours."""


def add_tls_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of whoever connects to a collector."""
    parser.add_argument(
        "--tls-ca",
        type=Path,
        help="file of the authorities, in PEM, one of which signed the collector's certificate; without it those that "
        "the system trusts",
    )
    parser.add_argument(
        "--tls-client-cert",
        type=Path,
        help="file of our own certificate, in PEM, for a collector that wants one",
    )
    parser.add_argument(
        "--tls-client-key",
        type=Path,
        help="file of that certificate's private key, if it is not in the same file",
    )


def trust(context: ssl.SSLContext, path: Path, option: str) -> None:
    """Believe what the authorities of a file signed, and nothing else. Raises SettingsError."""
    try:
        context.load_verify_locations(cafile=path)
    except ssl.SSLError:
        raise SettingsError(f"{option} {path} holds no certificate in PEM") from None
    except OSError as error:
        raise SettingsError(f"{option} {path} cannot be read: {error.strerror}") from None


def load_identity(
    context: ssl.SSLContext, cert: Path, key: Path | None, cert_option: str, key_option: str
) -> None:
    """Show a certificate and prove it by its key, which nobody else may read. Raises SettingsError."""
    key_path = key or cert
    try:
        cert.open("rb").close()
    except OSError as error:
        raise SettingsError(f"{cert_option} {cert} cannot be read: {error.strerror}") from None
    shown = f"{key_option if key else cert_option} {key_path}"
    try:
        with key_path.open("rb") as file:
            check_private(os.fstat(file.fileno()), shown)
        context.load_cert_chain(cert, key, password=lambda: _no_passphrase(shown))
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            raise SettingsError(f"{shown} is not the key of {cert_option} {cert}") from None
        raise SettingsError(f"{cert_option} {cert} and its key cannot be used: both must be PEM") from None
    except OSError as error:
        raise SettingsError(f"{shown} cannot be read: {error.strerror}") from None


def _no_passphrase(shown: str) -> str:
    # OpenSSL would ask on the terminal, and a service has none.
    raise SettingsError(f"{shown} is encrypted: give a key without a passphrase")


def told(error: BaseException) -> str:
    """What went wrong between us and a TLS port, in words; empty if it was nothing of TLS."""
    found = next((each for each in _chain(error) if isinstance(each, ssl.SSLError)), None)
    if found is None:
        return ""
    if isinstance(found, ssl.SSLCertVerificationError):
        return _verification(found)
    reason = found.reason or ""
    if reason in _NO_TLS:
        return "it speaks no TLS: write ws://, or give the collector --tls-cert"
    if reason in _CERTIFICATE_WANTED:
        return "it wants a certificate of ours: give one by --tls-client-cert and --tls-client-key"
    if reason in _CERTIFICATE_REFUSED:
        return "it does not accept our certificate: compare --tls-client-cert with its --tls-client-ca"
    return f"TLS: {reason.replace('_', ' ').lower() or type(found).__name__}"


def _verification(error: ssl.SSLCertVerificationError) -> str:
    code = error.verify_code
    if code == 10:
        return "its certificate has expired: renew it"
    if code == 9:
        return "its certificate is not valid yet: compare the clocks"
    if code in _UNKNOWN_SIGNER:
        return "nobody we trust signed its certificate: give the authority that did by --tls-ca"
    if code in _OTHER_NAME:
        return (
            "its certificate is for another name: write the address in --collector as the certificate has it"
        )
    return f"its certificate cannot be verified: {error.verify_message}"


def _chain(error: BaseException) -> Iterator[BaseException]:
    """An exception, and what led to it."""
    known: list[BaseException] = []
    left: list[BaseException | None] = [error]
    while left:
        found = left.pop(0)
        if found is None or found in known:
            continue
        known.append(found)
        yield found
        left += [found.__cause__, found.__context__]
        if isinstance(found, BaseExceptionGroup):
            left += found.exceptions
