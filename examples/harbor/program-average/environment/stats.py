def average(numbers):
    return sum(numbers) // len(numbers)
