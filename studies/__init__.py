# SPDX-License-Identifier: Apache-2.0
"""Studies: groups of training runs that answer questions, their queue, and their report."""
