"""A file of version 1, as it was written on 27 November 2026, stays readable."""

from __future__ import annotations

import base64

from shardwise.telemetry.encoding import decode_file
from tests.telemetry.tables import same, table_of

FILE = """
H4sIAAAAAAAAA42SwXLjIAyG34Xryo7AYKd+jr1lMh0Sk8ZTx3iANNtm8u4r5LQb7+6h8RCQ9Al+Ca7i4MPJJtGKeLShu/TR
FckN7uRSeBcg3lyIvR9FK0H4yQWb2BLRvjkK9x2t7W75kT8mN1EOIojJpiNBq3Ae48qucqTA/KMokzYkl7dRqOpCykI1P1G3
aFqsSwabH4jtDLu9H7tIO5cGDYiLD0P3HPsPJ9o1iKHfBUuyWyFLVVaUEOz4SvgGQYKCCjSYLYijjyl7eVGguLuY+/rIaX85
xqaJturyX5oyvPc+dP1oE4eXSWxJPk6xJeE+tjlz8PtXyik0QqEqKGqQhK5BZ10792JHVlFBDU8gFcjspx698FFXMdoT1Sqm
gcB788ifGy2RTkXKwIqGppFTu/PnlW0MgpFgFJgKDDWCT3yfa1jWfegHOmQznoeBrEBPof8PdbE9Xxy5G5AaFBdSme0NvnRe
AjFLoVR4FkpK51nTvBQq+da5j3lW9eeKtOODaIlN1Wi5VpqBu1E/GuvHekTgfYu/32sZ7cElN0YfooBcNcyo+j6qv4H+00s1
P41lL/+0+EaB6Whj5q+UagkwpbndfgNnlKh8tgMAAA==
"""


def test_version_1_is_read() -> None:
    assert same(decode_file(base64.b64decode(FILE), "golden"), table_of(range(6), 8))
