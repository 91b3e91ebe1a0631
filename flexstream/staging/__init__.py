"""Rows that count only once their batch is committed."""
