"""Reads the form of an upload while it arrives (pure)."""

from __future__ import annotations

from typing import Final

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from common.errors import InvalidRequest
from frontend_svc.openai.body.validation_errors import (
    INVALID_TYPE,
    INVALID_VALUE,
    UNKNOWN_PARAMETER,
)

FILE: Final = "file"
FIELDS: Final = ("purpose", "expires_after[anchor]", "expires_after[seconds]")
# Of the value of a field.
_VALUE_BYTES_MAX: Final = 256
_NOT_A_FORM: Final = "The body must be a form: multipart/form-data with 'file' and 'purpose'."


class UploadForm:
    """The fields of a form, and the content of its file in parts. Raises InvalidRequest for a
    Content-Type that is no form.

    fields: by name, as far as they have arrived. filename: "" before the file.
    """

    def __init__(self, content_type: bytes) -> None:
        kind, options = parse_options_header(content_type)
        boundary = options.get(b"boundary")
        if kind != b"multipart/form-data" or not boundary:
            raise InvalidRequest(_NOT_A_FORM, reason=INVALID_TYPE)
        self.fields: dict[str, str] = {}
        self.filename = ""
        self._content: list[bytes] = []
        self._name = ""
        self._value = b""
        self._header = self._header_value = b""
        self._disposition = b""
        self._has_ended = False
        try:
            self._parser = MultipartParser(
                boundary,
                {
                    "on_part_begin": self._on_part_begin,
                    "on_part_data": self._on_part_data,
                    "on_part_end": self._on_part_end,
                    "on_header_field": self._on_header_field,
                    "on_header_value": self._on_header_value,
                    "on_header_end": self._on_header_end,
                    "on_headers_finished": self._on_headers_finished,
                    "on_end": self._on_end,
                },
            )
        except FormParserError as error:
            raise _invalid(error) from None

    def feed(self, data: bytes) -> bytes:
        """Returns the content of the file that a part of the body has. Raises InvalidRequest."""
        try:
            self._parser.write(data)
        except FormParserError as error:
            raise _invalid(error) from None
        content, self._content = b"".join(self._content), []
        return content

    def close(self) -> None:
        """Checks that the form is complete. Raises InvalidRequest."""
        if not self._has_ended:
            raise InvalidRequest("The form is not complete.", reason=INVALID_VALUE)
        for name in (FILE, "purpose"):
            present = self.filename if name == FILE else self.fields.get(name)
            if not present:
                text = f"Missing required parameter: '{name}'."
                raise InvalidRequest(text, name, reason="MISSING_REQUIRED_PARAMETER")

    @property
    def expires_after_s(self) -> int:
        """Seconds after which the file is removed; 0: the client chose none. Raises
        InvalidRequest."""
        anchor, seconds = (self.fields.get(name) for name in FIELDS[1:])
        if anchor is None and seconds is None:
            return 0
        if anchor != "created_at":
            text = "'expires_after[anchor]' must be 'created_at'."
            raise InvalidRequest(text, "expires_after.anchor", reason=INVALID_VALUE)
        if seconds is None or not seconds.isascii() or not seconds.isdecimal():
            text = "'expires_after[seconds]' must be a number."
            raise InvalidRequest(text, "expires_after.seconds", reason=INVALID_VALUE)
        return int(seconds[:10])

    # The parser calls these in the order of the body.

    def _on_part_begin(self) -> None:
        self._name, self._value, self._disposition = "", b"", b""

    def _on_header_field(self, data: bytes, start: int, end: int) -> None:
        self._header += data[start:end]

    def _on_header_value(self, data: bytes, start: int, end: int) -> None:
        self._header_value += data[start:end]

    def _on_header_end(self) -> None:
        if self._header.lower() == b"content-disposition":
            self._disposition = self._header_value
        self._header = self._header_value = b""

    def _on_headers_finished(self) -> None:
        _, options = parse_options_header(self._disposition)
        self._name = options.get(b"name", b"").decode(errors="replace")[:64]
        if self._name == FILE:
            if self.filename:
                raise InvalidRequest("The form has several files.", FILE, reason=INVALID_VALUE)
            name = options.get(b"filename", b"").decode(errors="replace")
            self.filename = name or FILE
        elif self._name not in FIELDS:
            text = f"Unknown parameter: '{self._name}'."
            raise InvalidRequest(text, self._name, reason=UNKNOWN_PARAMETER)

    def _on_part_data(self, data: bytes, start: int, end: int) -> None:
        if self._name == FILE:
            self._content.append(data[start:end])
            return
        self._value += data[start:end]
        if len(self._value) > _VALUE_BYTES_MAX:
            text = f"'{self._name}' is longer than {_VALUE_BYTES_MAX} bytes."
            raise InvalidRequest(text, self._name, reason=INVALID_VALUE)

    def _on_part_end(self) -> None:
        if self._name != FILE:
            self.fields[self._name] = self._value.decode(errors="replace")

    def _on_end(self) -> None:
        self._has_ended = True


def _invalid(error: Exception) -> InvalidRequest:
    return InvalidRequest(f"The form is not valid: {error}.", reason=INVALID_VALUE)
