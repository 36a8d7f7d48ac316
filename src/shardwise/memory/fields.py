"""The types of the fields of records. A record with another value is damaged."""

from __future__ import annotations

from typing import Annotated

import msgspec

PlainName = Annotated[str, msgspec.Meta(pattern=r"\A[A-Za-z0-9][A-Za-z0-9._-]{0,199}\Z")]
MadeName = Annotated[str, msgspec.Meta(pattern=r"\A[.]?[A-Za-z0-9][A-Za-z0-9._-]{0,199}\Z")]
"""The name of a file that an agent makes; it begins with a dot until the file is complete."""
SaveId = Annotated[str, msgspec.Meta(pattern=r"\A[0-9a-f]{16}\Z")]
Seconds = Annotated[float, msgspec.Meta(ge=0.0)]
RequestedStage = Annotated[str, msgspec.Meta(pattern=r"\A(commit|protect|persist)\Z")]
AnyStage = Annotated[str, msgspec.Meta(pattern=r"\A(stage|commit|protect|persist|retain|rescue)\Z")]
