"""Every error this package raises on purpose.

Each class is also a :class:`ValueError` (wrong input) or a :class:`RuntimeError` (wrong time, wrong
place), so that code which knows only the built-in classes still catches it. Each message says what was
asked, what is there, and what would work.
"""


class GroupsError(Exception):
    """Base class of the package's own errors."""


class LayoutError(GroupsError, ValueError):
    """Sizes, an order or a rank list that cannot be laid over the world."""


class ShapeError(GroupsError, ValueError):
    """A tensor whose dims do not divide over the group it is to be split over."""


class ContextError(GroupsError, RuntimeError):
    """The context was used before it was initialized, after it was destroyed, or set up twice."""


class ModeError(GroupsError, RuntimeError):
    """A mode that was never set up, or that has no group with this rank in it."""


class AgreementError(GroupsError, RuntimeError):
    """The ranks of one job asked for different things, or one of them never asked."""


class GradientError(GroupsError, RuntimeError):
    """Gradients that are infinite or no numbers where that was not to be."""


class CheckpointError(GroupsError, RuntimeError):
    """A checkpoint that cannot be written, or that does not hold what the model and its layout need."""
