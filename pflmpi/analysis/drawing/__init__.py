"""Drawing: figures as Vega-Lite charts, and charts as SVG, PNG, PDF and Altair objects."""
