"""What stock verl would do with the same batch.

May import: errors, plan.
"""
