"""markers"""
