"""What `import zoo` offers beside its models."""
