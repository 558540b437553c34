# SPDX-License-Identifier: Apache-2.0
"""What trainer and servers share: format, encodings, digest, chain of versions, stores."""

__version__ = "0.1.0"
