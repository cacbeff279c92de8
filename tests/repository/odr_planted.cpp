// Compiled twice: two classes of one name, a violation of the one definition rule that the test of
// it must find.
class Planted {
 public:
    int value() const;
    int first = VARIANT;
#if VARIANT == 2
    double second = 0.0;
#endif
};

#if VARIANT == 1
int Planted::value() const {
    return first;
}
#else
int planted() {
    return Planted().value();
}
#endif
