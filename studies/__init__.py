# SPDX-License-Identifier: Apache-2.0
"""Studies: groups of training runs that answer questions, their queue, and their report.

This file makes a regular package of the folder, which benchmarks/studies.py cannot hide from its neighbours.
"""
