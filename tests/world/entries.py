"""All architectures."""

from world.language import LANGUAGE
from world.manners import MANNERS
from world.recommenders import RECOMMENDERS
from world.vision import VISION

ENTRIES = [*LANGUAGE, *VISION, *RECOMMENDERS, *MANNERS]
