# SPDX-License-Identifier: Apache-2.0
"""Runs work that waits for numpy, a disk or a network concurrently in threads, with results in order."""

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import islice

MOST_THREADS = 8  # the default's limit: threads compete for Python's lock


def in_threads(function: Callable, items: Iterable, count: int = 0) -> Iterator:
    """Yield function(item) of each item, in order. At most `count` calls run ahead, and none starts after `close`.

    Args:
        count: of threads, and of results that are held in memory; 0: the number of cores, at most MOST_THREADS, plus 1.
    """
    count = count or min(os.cpu_count(), MOST_THREADS) + 1
    threads, interrupted = ThreadPoolExecutor(count), False
    try:
        begin = (threads.submit(function, item) for item in items)
        begun = deque(islice(begin, count))
        while begun:
            yield begun.popleft().result()
            begun.extend(islice(begin, 1))
    except (KeyboardInterrupt, GeneratorExit) as error:  # in here, or where the results are used
        interrupted = KeyboardInterrupt in (type(error), type(error.__context__))
        raise
    finally:
        # Calls under way may take minutes, as on a slow network.
        threads.shutdown(wait=not interrupted, cancel_futures=True)
