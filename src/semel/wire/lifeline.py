"""How a client asks that its transactions end with their connection: by the name of its software.

ApiVersions, the first request of a connection, tells the name. Semel aborts what was begun over such a
connection as soon as it is gone; a broker that does not know the name waits for the transaction's timeout.
"""

from typing import Final

LIFELINE_SOFTWARE_NAME: Final = "semel-lifeline"
