"""Text as samples: documents or rows of ids -> tokens of two sides -> samples of fixed length."""
