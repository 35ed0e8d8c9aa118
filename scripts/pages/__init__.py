"""What all pages share: tables, records, figures, the site, and the output of code in pages."""
