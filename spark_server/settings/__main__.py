"""`python -m spark_server.settings --markdown` prints docs/settings.md."""

from __future__ import annotations

import sys

from spark_server.settings.markdown import settings_markdown

if __name__ == "__main__":
    if sys.argv[1:] != ["--markdown"]:
        sys.exit("usage: python -m spark_server.settings --markdown")
    sys.stdout.write(settings_markdown())
