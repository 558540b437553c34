# SPDX-License-Identifier: Apache-2.0
"""The commands of `delta-wire`, one module each.

A module imports numpy and everything above it only where it is needed: `--help` must not wait for it.
"""
