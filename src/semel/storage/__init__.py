"""Segments: a view of the journal that Fetch reads. Flush, retention, compaction."""
