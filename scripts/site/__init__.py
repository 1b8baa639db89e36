"""The documentation site: pages of the repository arranged by ``mkdocs.yml``, and pages made for it alone."""
