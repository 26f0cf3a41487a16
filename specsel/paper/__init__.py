"""The book: claims, words, charts, build."""
