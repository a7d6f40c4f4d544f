"""Decorating functions with a region: plain ones, generators, coroutines and async generators."""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import AsyncGenerator, Callable, Generator
from typing import Any, TypeVar

import torch

from ..errors import ArgumentTypeError

__all__ = ["decorate"]

_F = TypeVar("_F", bound=Callable[..., Any])


def _drive(steps: Any, region: Callable[[], torch.autocast]) -> Generator[Any, Any, Any]:
    """Run a generator or coroutine with the region around each step and never while suspended."""
    resume, argument = steps.send, None
    while True:
        try:
            with region():
                value = resume(argument)
        except StopIteration as stop:
            return stop.value
        finally:
            argument = None  # else an exception sent in, and the frames it holds, would stay alive
        try:
            argument = yield value
            resume = steps.send
        except GeneratorExit:
            with region():
                steps.close()
            raise
        except BaseException as exc:
            resume, argument = steps.throw, exc


class _Driven:
    """An awaitable, driven step by step."""

    def __init__(self, steps: Any, region: Callable[[], torch.autocast]) -> None:
        self._steps, self._region = steps, region

    def __await__(self) -> Generator[Any, Any, Any]:
        return _drive(self._steps, self._region)


def decorate(func: _F, region: Callable[[], torch.autocast]) -> _F:
    """``func`` with the region that ``region()`` gives around it while it runs."""
    if isinstance(func, (staticmethod, classmethod)):
        return type(func)(decorate(func.__func__, region))
    if inspect.isclass(func):
        raise ArgumentTypeError(
            f"autocast decorates functions and methods, got the class {func.__name__}; "
            "decorate its methods (for a module: forward)"
        )
    # What a callable object does when called is written in its __call__.
    called = func if inspect.isroutine(func) else type(func).__call__
    wrapper: Callable[..., Any]
    if inspect.isasyncgenfunction(called):

        @functools.wraps(func)
        async def wrapper(*args: Any, **kwargs: Any) -> AsyncGenerator[Any, Any]:
            steps = func(*args, **kwargs)
            step = steps.asend(None)
            while True:
                try:
                    value = await _Driven(step.__await__(), region)
                except StopAsyncIteration:
                    return
                finally:
                    del step
                try:
                    step = steps.asend((yield value))
                except GeneratorExit:
                    await _Driven(steps.aclose().__await__(), region)
                    raise
                except BaseException as exc:
                    step = steps.athrow(exc)

    elif inspect.iscoroutinefunction(called):

        @functools.wraps(func)
        async def wrapper(*args: Any, **kwargs: Any) -> Any:
            return await _Driven(func(*args, **kwargs), region)

    elif inspect.isgeneratorfunction(called):

        @functools.wraps(func)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            return (yield from _drive(func(*args, **kwargs), region))

        if called.__code__.co_flags & inspect.CO_ITERABLE_COROUTINE:
            wrapper = types.coroutine(wrapper)

    else:

        @functools.wraps(func)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            with region():
                return func(*args, **kwargs)

    # TorchScript would follow __wrapped__ past the region; torch's own decorator says so as well.
    wrapper.__dict__["__script_unsupported"] = "amphal.autocast is not supported in script mode"
    return wrapper  # type: ignore[return-value]
