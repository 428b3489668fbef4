"""The generated worlds of the book, Find and Match, scenes, and their shifts; and a language."""

from atbook.worlds.glyphs import glyph_images as glyph_images
from atbook.worlds.glyphs import marked_glyphs as marked_glyphs
