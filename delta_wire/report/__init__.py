# SPDX-License-Identifier: Apache-2.0
"""One page about a run for somebody who has never seen the project: collected, drawn, written."""
