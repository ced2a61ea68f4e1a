"""How long a step takes and how much memory it needs: a cost model of shapes, bandwidth and FLOPs. No torch."""
