"""From rows to what a person looks at: plots, side-by-side video, one HTML page."""
